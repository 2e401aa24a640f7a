"""Passages written for this project, each with a question that it answers. Places and people in them are invented."""

BUILTIN_PASSAGES = (
    (
        "The ferry between Norhavn and the island of Skell has run since 1911. The first boat was a converted "
        "fishing cutter that carried twelve people and, on market days, their sheep. Today's ship takes forty cars "
        "and crosses in thirty-five minutes. In January, when the strait freezes, an icebreaker goes ahead of it "
        "twice a day. The islanders voted against a bridge in 1998 and again in 2014, both times because of the bird "
        "colonies.",
        "Why is there no bridge to the island?",
    ),
    (
        "Maria Oduya learned to repair clocks from a neighbour when she was nine. Her shop now holds some three "
        "hundred of them, none of which shows the same time. She says that customers who want the right time should "
        "look at their telephones. What people bring to her are memories: a kitchen clock that stopped on the day of "
        "a wedding, an alarm clock that went to sea. She charges by the hour, but never for the first one.",
        "What does the first hour of a repair cost?",
    ),
    (
        "Composting needs four things: something green, something brown, air and water. Green material such as grass "
        "brings nitrogen, brown material such as leaves or cardboard brings carbon. A heap with too much green "
        "smells, one with too much brown does nothing for months. Turning it every two weeks lets air in. If it is "
        "as moist as a sponge that was wrung out, it is right. Meat and cooked food attract rats and should stay "
        "out.",
        "What does it mean if a compost heap smells?",
    ),
    (
        "The town library of Velden lent 61,000 books last year, 4,000 fewer than the year before. At the same time "
        "the number of visitors rose from 88,000 to 97,000. The director explains that many come to work, to meet or "
        "to get warm. The council wants to cut the opening hours on Mondays, when a fifth of all visits take place. "
        "A petition against the cut has 2,300 signatures, which is every fourteenth inhabitant.",
        "On which day does the council want to shorten the opening hours, and how many of the visits are on that day?",
    ),
    (
        "A lithium-ion cell ages in two ways. Calendar ageing goes on even if nobody touches the battery; it is "
        "fastest when the cell is full and warm. Cycle ageing comes from charging and discharging, and deep cycles "
        "cost more than shallow ones. A device that is plugged in all day at 100 percent in a warm room therefore "
        "ages quickly although it is hardly used. Many laptops can stop charging at 80 percent, which about halves "
        "that effect.",
        "Why may a laptop's battery age quickly although it is always plugged in?",
    ),
    (
        "When the potter Ilse Brandt moved to the valley, the clay there was thought to be useless. It is full of "
        "iron and cracks when it dries too fast. She mixed it with a tenth of crushed sandstone and let the pots dry "
        "under wet cloth for eleven days. Her dark red bowls became known far beyond the valley. After her death in "
        "1967 the workshop passed to two of her pupils, who still keep the cloths in the river overnight.",
        "How did Ilse Brandt keep the pots from cracking?",
    ),
    (
        "Migrating cranes fly in a V because each bird saves strength in the rising air beside the wing tip of the "
        "one in front. The leader has no such help, so the birds take turns. Measurements with small sensors showed "
        "that a crane's heart beats about a tenth slower in the formation than alone. Young birds first fly too "
        "close or too far back, and need some hundred kilometres until they have found the right place.",
        "What did the sensors show?",
    ),
    (
        "The project began on 3 March with a budget of 240,000 euros. By June, 150,000 had been spent, mostly on the "
        "new pumps, and two of five wells were connected. The contractor then found an old gas pipe that is on no "
        "map, and work stopped for six weeks. The remaining wells are now planned for November. The mayor expects "
        "the final cost to be 30,000 euros above the budget, which the province has agreed to pay.",
        "Who pays for the additional cost, and how much is it?",
    ),
    (
        "Rule 1: A player may move one stone or turn it over, but not both. Rule 2: A stone that lies upside down "
        "cannot be captured. Rule 3: Who captures a stone puts it in front of them; three stones of one colour win "
        "the game. Rule 4: If a player cannot move, the other one moves twice. Rule 5: The same position must not "
        "appear three times; who would bring it about has to do something else.",
        "Can a stone that lies upside down be captured?",
    ),
    (
        "Sourdough starters are communities of yeasts and lactic acid bacteria. A study of five hundred of them from "
        "four continents found that where a starter comes from says little about what lives in it. The flour "
        "mattered more, and the baker's habits most of all. Starters that are kept in a refrigerator had fewer kinds "
        "of yeast. About a third contained acetic acid bacteria, which had been thought to be rare and which slow "
        "the dough down.",
        "What mattered most for what lives in a starter?",
    ),
    (
        "The night bus 9 starts at the main station every thirty minutes from 00:15 to 04:45. It stops at the "
        "theatre, the hospital, the university and Lindenplatz, and reaches the airport after 42 minutes. Tickets of "
        "the day are valid until the last bus. Bicycles are carried if there is room, folded ones always. On the "
        "nights before public holidays the bus runs every fifteen minutes, and the stop at the theatre moves to the "
        "opposite side.",
        "When does the bus run every fifteen minutes?",
    ),
    (
        "For a long time the tower of Saint Alban leaned by no more than a hand's breadth a century. After the "
        "brewery next door began to pump water in 1890, it moved a hand's breadth in nine years. Pumping was "
        "forbidden in 1902, and the tower stood still. Engineers later filled the gravel below with cement through "
        "forty narrow pipes. Since 1975 a laser on the town hall has measured the tower every hour; it sways by two "
        "millimetres in the sun.",
        "What made the tower lean faster after 1890?",
    ),
    (
        "Dear residents, the lift in staircase B will be replaced from 6 to 24 May. During these weeks please use "
        "staircase A; the doors between them on floors 2 and 5 stay open day and night. Shopping can be left with "
        "the caretaker, who brings it up between 17:00 and 19:00. Residents who cannot climb stairs may stay in the "
        "guest flat on the ground floor free of charge. Please call the office by 29 April if you need it.",
        "What should residents do who cannot climb stairs, and until when?",
    ),
    (
        "An octopus has about five hundred million nerve cells, and two thirds of them are in its arms. Each arm can "
        "taste what it touches and can decide on simple movements alone. In one experiment an arm that had been cut "
        "off still pulled back from acid. The brain seems to give goals rather than orders: it says what is to be "
        "reached and leaves the path to the arm. This may be why an octopus rarely ties itself in knots.",
        "Where are most of an octopus's nerve cells?",
    ),
    (
        "The cooperative was founded by eleven families who wanted to buy coal together. Within ten years it had a "
        "shop, a mill and a savings bank. Its rule was that every member had one vote, however much money they had "
        "put in. In 1931 the bank closed for three days when half of the savers wanted their money at once, and "
        "opened again because the other half brought theirs back. The rule of one vote is still in its statutes.",
        "How many votes does a member have?",
    ),
    (
        "To descale the machine, fill the tank with half a litre of water and one bag of powder. Hold both buttons "
        "until the light blinks orange, then put a bowl under the outlet. The machine runs for about twenty minutes "
        "with pauses; do not switch it off. When the light blinks green, rinse the tank, fill it with clean water "
        "and press any button. Repeat this rinsing once more. The light is white when the machine is ready for "
        "coffee.",
        "What does it mean when the light blinks green?",
    ),
    (
        "Farmers on the high plain plant quinoa and beans in the same row. The beans fix nitrogen, which quinoa "
        "needs; the quinoa's stalks hold the beans up. In dry years the mixture yields a fifth more grain than "
        "quinoa alone, in wet years the difference vanishes. Harvest is more work, because the two ripen three weeks "
        "apart and no machine can tell them apart. Most families say that they keep the custom for the soil rather "
        "than for the grain.",
        "In which years does the mixture yield more than quinoa alone?",
    ),
    (
        "The meeting agreed on three points. First, the old website stays online until the end of the year, with a "
        "note that points to the new one. Second, Jonas asks two firms for an offer to translate the manual into "
        "Polish; the limit is 5,000 euros. Third, Samira tests the new booking form with five customers before it is "
        "published. No agreement was reached about the logo. The next meeting is on 12 October, and Lea takes the "
        "minutes.",
        "What did the meeting not agree on?",
    ),
    (
        "Glass is often said to be a very slow liquid, because old window panes are thicker at the bottom. They are, "
        "but not because they flowed. Panes used to be spun from a disc that was thicker near its middle, and "
        "glaziers put the heavy edge down. Calculations show that at room temperature glass would need longer than "
        "the age of the universe to flow by a visible amount. Some old panes are thicker at the top: there the "
        "glazier was careless.",
        "Why are many old window panes thicker at the bottom?",
    ),
    (
        "On the third day the wind turned to the north and the expedition could not see its own sledges. Captain "
        "Reyes had the dogs untied, so that they would find shelter, and let the men build a wall of snow. They "
        "waited thirty-one hours and ate cold porridge. When it cleared, all dogs but one had come back, and the "
        "camp was four kilometres from where it had been: the ice had drifted. Reyes wrote only two words into his "
        "diary, 'We travelled.'",
        "Why was the camp in another place after the storm?",
    ),
)
